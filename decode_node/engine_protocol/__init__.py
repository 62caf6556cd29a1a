"""The engine protocol that gateways of other projects speak, served beside our own.

An adapter: what comes in becomes requests of the Decode service, in the same process, and what comes out is what that
answered, so that there is one set of rules, one engine and one table of failures. The messages are those of the package
smg-grpc-proto, which is optional: this package alone imports it, once a configuration asks for it.
"""
