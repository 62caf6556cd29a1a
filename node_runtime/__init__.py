"""What every pdmesh node shares: configuration, process life cycle, RPC plumbing, wire codecs, engine loop, handoff.

Knows nothing of any single role. Importing the package imports nothing heavy: the router runs on it without torch.
"""
