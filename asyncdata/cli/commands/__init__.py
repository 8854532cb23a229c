"""What the commands of ``asyncdata.cli`` do, a module each; their options and help are in ``cli``."""
