-- One call of a function: what the caller sent, and the server's commands.
--
-- All keys have one prefix and are computed: use one server, with or without replicas, not a cluster.
-- A module lives as long as the server does. Whatever it remembers of one call it sets anew in a function that it
-- gives to `on_begin`: a call that ended with an error leaves nothing to the next one.
local values = require('values')
local call = redis.call
local MAX_ARGS = 4000

local M = {
  prefix = '', -- of all keys of the ledger
  beside = '', -- prefix of what a rebuild does not change
  required_state = '', -- that the ledger must be in: 'ready', 'open' (ready or being rebuilt), 'any', or 'check'
  feed_length = 0,
  tail = '', -- bytes that are stored as they are, joined
  -- The highest version that the caller has read: if this server's is lower, it has lost confirmed writes, and the
  -- ledger rejects calls until it is rebuilt.
  known_version = 0,
  MAX_ARGS = MAX_ARGS, -- of one command
}
local resets = {}

-- Let `reset` be called at the beginning of each call.
function M.on_begin(reset) resets[#resets + 1] = reset end

-- Begin a call, and return its arguments. ARGV: prefix, arguments as a MessagePack array, and the fields above in
-- order.
function M.begin(argv)
  M.argv = argv
  M.prefix = argv[1]
  M.beside = string.gsub(M.prefix, ':$', '')
  M.required_state = argv[3]
  M.feed_length = tonumber(argv[4])
  M.tail = argv[5]
  M.known_version = tonumber(argv[6])
  for i = 1, #resets do resets[i]() end
  return cmsgpack.unpack(argv[2])
end

-- Call a command with all of `names`, some at a time, and return the replies to each.
function M.call_all(command, key, names)
  local replies = {}
  if #names > 0 and #names <= MAX_ARGS then return call(command, M.prefix .. key, unpack(names)) end
  for from = 1, #names, MAX_ARGS do
    local page = call(command, M.prefix .. key, unpack(names, from, math.min(from + MAX_ARGS - 1, #names)))
    for i = 1, type(page) == 'table' and #page or 0 do replies[from + i - 1] = page[i] end
  end
  return replies
end

-- For each field of a hash its name and its record; without those that cannot be decoded.
function M.each_record(key, layout)
  local flat, i = call('HGETALL', key), -1
  return function()
    local record
    repeat
      i = i + 2
      record = values.record(flat[i + 1], layout)
    until record or not flat[i]
    return flat[i], record
  end
end

function M.number_at(key, field) return tonumber(call('HGET', M.prefix .. key, field) or 0) end

-- This server's clock: seconds, and microseconds.
function M.time() return call('TIME') end

-- This server's clock, in milliseconds.
function M.now_in_ms()
  local time = M.time()
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

return M
