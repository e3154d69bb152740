"""The tests: laws over tables. A package, so that `tests.laws` means this one and no other."""
