-- Note that the services use a library of functions, and find those that none has used for a day. Arguments: its name;
-- the names of all libraries of ours on this server. Returns those that can be deleted.
--   libraries  hash  library -> instant at which a binder that uses it has last noted it, or found it without a note
local server = require('server')
local values = require('values')
local call, encode = redis.call, cmsgpack.pack
local KEPT_S = 86400

return function(own, listed)
  local key = server.prefix .. 'libraries'
  local now = tonumber(server.time()[1])
  local is_listed, unused = values.set_of(listed), {}
  for name, noted_at in values.each_pair(call('HGETALL', key)) do
    if not is_listed[name] then
      call('HDEL', key, name)
    elseif name ~= own then
      is_listed[name] = nil
      -- A time ahead of ours is of a server whose clock was ahead.
      local age_s = now - tonumber(noted_at)
      if age_s < 0 then call('HSET', key, name, now) end
      if age_s > KEPT_S then
        unused[#unused + 1] = name
        call('HDEL', key, name)
      end
    end
  end
  is_listed[own] = true
  for name in pairs(is_listed) do call('HSET', key, name, now) end
  return encode(unused)
end
