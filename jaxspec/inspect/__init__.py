"""What a model holds, costs and chooses, found out without timing anything."""
