"""From responses to rewards."""
