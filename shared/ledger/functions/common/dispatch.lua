-- Calls a function for the server: reads the ledger first, and nothing happens if it cannot be used.
local ledger = require('ledger')
local server = require('server')

return function(run, argv, may_write)
  local args = server.begin(argv)
  local refusal = ledger.open(may_write)
  if refusal then return refusal end
  local reply = run(unpack(args))
  if may_write then ledger.close() end
  return reply
end
