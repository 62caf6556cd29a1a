"""Typed layer windows over one arena. A pool allocates nothing and forwards nothing of the arena's geometry."""
