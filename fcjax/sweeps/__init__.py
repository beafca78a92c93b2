"""Many runs: their plan, their execution, their files and their results."""
