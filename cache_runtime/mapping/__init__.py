"""The one logical-to-physical mapping point: block tables in, page tables and write locations out."""
