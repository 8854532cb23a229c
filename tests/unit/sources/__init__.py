"""Where rows live, module by module."""
