-- Answers the epoch and the capacity number.
return pack({epoch, capacity})
