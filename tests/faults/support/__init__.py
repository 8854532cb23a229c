"""What the fault tests share: programs that are killed, and a simulated world. Worker processes import it by path."""
