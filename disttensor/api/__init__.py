"""Functions that make, convert and map DistTensors."""
