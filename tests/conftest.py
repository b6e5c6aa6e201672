"""What all tests share: memory that nobody has written is no number."""
from tests import unwritten

unwritten.fill_what_is_empty()
