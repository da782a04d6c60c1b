-- Write a key that expires at once: a server that refuses writes refuses this, too.
local server = require('server')
local call = redis.call

return function()
  call('SET', server.prefix .. 'written', 1, 'PX', 1)
end
