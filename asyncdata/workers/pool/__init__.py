"""Worker processes of this machine: forked from a fork server, watched, replaced when they die."""
