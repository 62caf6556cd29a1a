"""Engines on several tensor ranks: one leads and serves, the others mirror its scheduler and compute their heads."""
