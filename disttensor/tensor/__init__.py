"""DistTensor: the class, its gradients, views that had to copy, its Python values, and resharding
it.

Not here: how a torch function on it is carried out (``disttensor.dispatch``).
"""
