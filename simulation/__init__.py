"""A whole mesh in one thread and virtual time, from one seed: real nodes on a simulated network, device and model."""
