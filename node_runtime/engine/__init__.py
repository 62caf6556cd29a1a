"""The engine of a compute node: one thread that owns the scheduler and the executor, and the values it exchanges."""
