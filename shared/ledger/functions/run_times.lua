-- What was learned of run times; no rebuild changes it. Without an argument it is returned; with one, the tail
-- replaces it.
local server = require('server')
local call = redis.call

return function(saves)
  if saves then call('SET', server.beside .. '-run-times', server.tail) end
  return {call('GET', server.beside .. '-run-times') or ''}
end
