-- List records that cannot be read. Arguments: kind (see `kinds.lua`, or 'expiring'), cursor, count. Returns the next
-- cursor ('0': complete) and the names of the records; a group of `expiring` reservations has none.
local kinds = require('kinds')
local layouts = require('layouts')
local server = require('server')
local values = require('values')
local call, encode = redis.call, cmsgpack.pack

local function unreadable_groups(cursor, count)
  local page, names = call('ZSCAN', server.prefix .. 'expiring', cursor, 'COUNT', count), {}
  for group in values.each_pair(page[2]) do
    if not values.record(group, layouts.EXPIRING) then names[#names + 1] = '' end
  end
  return page[1], names
end

local function unreadable_fields(kind, cursor, count)
  local page, names = call('HSCAN', kinds.key(kind), cursor, 'COUNT', count), {}
  for name, value in values.each_pair(page[2]) do
    if not kinds.is_readable(kind, value) then names[#names + 1] = name end
  end
  return page[1], names
end

return function(kind, cursor, count)
  if kind == 'expiring' then return encode({unreadable_groups(cursor, count)}) end
  return encode({unreadable_fields(kind, cursor, count)})
end
