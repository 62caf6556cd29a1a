"""Codecs between protobuf messages and domain values, and the rules of the wire contract.

Every codec is total: a message either becomes a checked value or raises InvalidRequest that names the field. The
modules are separate so that a router can use `validation` and `outcome` without what a compute node needs.
"""
