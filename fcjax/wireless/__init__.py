"""The uplink of a cell: channels, rates, bandwidth allocation and computation times."""
