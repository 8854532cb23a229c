"""What the fault tests share: programs that are killed. Worker processes import it by path."""
