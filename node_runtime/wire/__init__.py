"""Codecs between protobuf messages and domain values.

Every codec is total: a message either becomes a checked value or raises InvalidRequest that names the field.
"""
