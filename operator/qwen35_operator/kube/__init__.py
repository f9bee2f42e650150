"""All cluster I/O: one client, watches that fill stores, the work queue, and the Lease."""
