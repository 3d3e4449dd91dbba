"""What people run to look at a store or a machine."""
