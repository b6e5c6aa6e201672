"""What all tests share: memory that nobody has written is no number; Ctrl-C interrupts."""
import signal

from tests import unwritten

unwritten.fill_what_is_empty()
# A shell starts what it puts into the background, such as a test run, with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
