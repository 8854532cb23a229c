"""One file of cached samples: its layout, its reader and its writer."""
