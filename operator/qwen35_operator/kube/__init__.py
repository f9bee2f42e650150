"""Access to the cluster: the client, watches that fill stores, and the Lease. The work queue is also here."""
