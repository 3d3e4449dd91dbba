"""What pytest has to know before it imports the test kit."""

import pytest

pytest.register_assert_rewrite("hicache.testing")
