"""How many examples hypothesis tries of a property whose examples are expensive, or which has many parameters."""

from hypothesis import settings


def in_ci(max_examples):
    """So many with the profile ``ci``. With the others as many as of any property: with ``long`` 20,000."""
    return settings(max_examples=max_examples) if settings.get_current_profile_name() == "ci" else settings()
