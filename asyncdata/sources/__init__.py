"""Where rows live: descriptions of sources, and the blocks they are cut into."""
