"""What a model holds, costs and chooses, without timing anything."""
