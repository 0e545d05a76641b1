set -eux
of() { systemctl show --value -p "$1" rtvirtiod; }
systemctl start rtvirtiod
# `Type=notify`: started means that the service itself has said so.
[ "$(of ActiveState)" = active ]
[ "$(of Type)" = notify ]
[ "$(of WatchdogUSec)" = 1min ]
first=$(of MainPID)
getent group rtvirtio
stat -c '%a %U %G %n' /run/rtvirtio/rtvirtiod.sock
rtvirtio status
# A death changes nothing, and systemd starts it again.
kill -9 "$first"
tries=0
until [ "$(of NRestarts)" = 1 ] && [ "$(of ActiveState)" = active ]; do
    tries=$((tries + 1))
    [ $tries -lt 300 ]
    sleep 0.2
done
[ "$(of MainPID)" != "$first" ]
rtvirtio status
systemctl stop rtvirtiod
[ "$(of ActiveState)" = inactive ]
[ "$(of Result)" = success ]
journalctl --quiet --no-pager -u rtvirtiod
echo 'all is as it should be'
