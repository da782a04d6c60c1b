-- Answers the epoch, the capacity number and the highest version.
return pack({epoch, capacity, seq})
