"""The `pdmesh` command and the Python client: the layer on top of everything else.

It does not know how a node works inside; it starts the roles, talks to them over their public services and shows what
they report.
"""
