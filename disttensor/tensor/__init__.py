"""DistTensor: the class, its gradients, copies in place of views, Python values, and resharding.

``disttensor.dispatch`` runs torch functions on it.
"""
