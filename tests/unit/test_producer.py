"""To be written by the engineer of the pure core, at this very moment."""
