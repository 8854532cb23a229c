"""What several tests share, and what worker processes import by path, as in ``tests.support.loading:fn``."""
