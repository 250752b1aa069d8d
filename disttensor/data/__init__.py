"""Data: a DataLoader whose batches are DistTensors."""
