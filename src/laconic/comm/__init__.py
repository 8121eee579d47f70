"""What travels: collectives and their cost, the exchanges made of them, and the drivers that run exchanges."""
