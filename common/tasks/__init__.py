"""What problems and rewards are made of: sources, rows, verifiers, answers, equality."""
