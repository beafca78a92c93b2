"""The uplink of a cell: channels, rates, bandwidth allocation, computation times."""
