"""Guarded forwards: recorded once for each kind of call, and then run as a program.

``replay`` runs the recorded local calls. ``skip`` runs programs off the mesh, where nothing is
computed.
"""
