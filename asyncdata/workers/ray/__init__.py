"""Workers on the nodes of a Ray cluster that exists: actors, as one more kind of workers of the pool.

``settings`` is what users write. ``cluster`` finds the cluster, and watches it. ``executor`` has the actors, as the
pool sees them; ``actor`` is what runs on the node, and makes requests that need no shared memory. ``node_proof`` finds
out whether a node sees the same data and functions.

ray is imported only when a cluster is used.
"""
