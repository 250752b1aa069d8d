"""Measures this machine as the Device and Network of a simulation."""
