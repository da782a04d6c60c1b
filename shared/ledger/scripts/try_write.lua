-- Write a key that expires at once: a server that refuses writes refuses this, too.
call('SET', PREFIX .. 'written', 1, 'PX', 1)
