"""Workers on the nodes of a Ray cluster that exists: an actor pool, as one more executor.

``settings`` is what users write. ``cluster`` finds the cluster. ``executor`` has the pool, in the trainer's process;
``remote_worker`` is an actor as the pool sees it, and ``actor`` what runs on the node. ``node_proof`` finds out whether
a node sees the same data and functions, and ``by_bytes`` makes requests that need no shared memory.

ray is imported only when a cluster is used.
"""
