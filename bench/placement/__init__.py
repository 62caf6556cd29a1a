"""The simulator behind bench_placement.py: traces, costs, nodes and a mesh in virtual time."""
