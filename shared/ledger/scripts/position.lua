-- Return {generation, capacity number, highest version}. Binders read it twice a second.
return encode({generation, capacity, last_version})
