// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/demos/pingpong"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/netns/testbed"
)

func TestPingpongFlags(t *testing.T) {
	parse := func(line string) (pingpong.Config, error) {
		var f pingpongFlags
		fl, err := parseFlags(f.bind, line)
		if err != nil {
			return pingpong.Config{}, err
		}
		return f.config(fl.Changed)
	}

	t.Run("the defaults are those of make demo", func(t *testing.T) {
		got, err := parse("")
		both := []rtt.Proto{rtt.ICMP, rtt.UDP}
		want := pingpong.Config{
			Protos: both, Modes: []pingpong.Mode{pingpong.Host, pingpong.NIC, pingpong.XDP, pingpong.TC, pingpong.HostNIC}, Sizes: []int{16, 516, 1016, 1416},
			Count: 10000, Warmup: 1000, Timeout: time.Second, ClientWait: rtt.Block, ClientCPU: -1,
			Server: pingpong.ServerConfig{Protos: both, HPUs: 16, Wait: "adaptive", AppSpin: 100 * time.Microsecond},
		}
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("error %v\ngot  %+v\nwant %+v", err, got, want)
		}
	})
	t.Run("--serve alone is about the NIC", func(t *testing.T) {
		for line, want := range map[string]pingpong.Mode{"--serve": pingpong.NIC, "--serve --tier kernel": pingpong.TC, "--serve --tier kernel --hook xdp": pingpong.XDP, "--serve --mode host+nic": pingpong.HostNIC} {
			if got, err := parse(line); err != nil || !reflect.DeepEqual(got.Modes, []pingpong.Mode{want}) || got.Server.Mode != want {
				t.Errorf("%s: modes %v, served by %s, error %v", line, got.Modes, got.Server.Mode, err)
			}
		}
	})

	t.Run("--pin gives client and server the CPUs of this process", func(t *testing.T) {
		client, server := pinTo(testbed.CPUs())
		got, err := parse("--pin")
		if err != nil || got.ClientCPU != client || !slices.Equal(got.Server.CPUs, server) {
			t.Errorf("client %d, server %v, error %v, want %d, %v", got.ClientCPU, got.Server.CPUs, err, client, server)
		}
	})
	for _, tc := range []struct {
		cpus   []int
		client int
		server []int
	}{{nil, -1, nil}, {[]int{3}, -1, nil}, {[]int{3, 5}, 3, []int{5}}, {[]int{2, 3, 5}, 2, []int{3}}} {
		if client, server := pinTo(tc.cpus); client != tc.client || !slices.Equal(server, tc.server) {
			t.Errorf("CPUs %v: client %d, server %v, want %d, %v", tc.cpus, client, server, tc.client, tc.server)
		}
	}

	checkFlags(t, parse, []flagCase{
		{"--proto icmp", "--proto tcp", "--proto tcp: want icmp, udp or both"},
		{"--mode nic", "--mode fpga", "--mode fpga: want host, nic"},
		{"--mode nic,host", "--mode nic,nic", "--mode nic,nic: want each mode once"},
		{"--mode nic,host+nic", "--mode nic+host", "--mode nic+host: want host, nic"},
		{"--mode nic --serve", "--mode host --serve", "--mode host: with --serve nic or host+nic"},
		{"--mode host+nic --serve", "--mode nic,host+nic --serve", "--mode nic,host+nic: with --serve nic or host+nic, not both"},
		{"--tier kernel,user", "--tier fpga", "--tier fpga: want user, kernel or both"},
		{"--hook tc,xdp", "--hook fpga", "--hook fpga: want xdp, tc or both"},
		{"--tier kernel --serve", "--tier kernel --hook xdp,tc --serve", "--hook xdp,tc: with --serve xdp or tc, not both"},
		{"--tier user", "--tier user,user", "--tier user,user: want user, kernel or both"},
		{"--tier user --serve", "--tier user,kernel --serve", "--tier user,kernel: with --serve user or kernel, not both"},
		{"--app-spin 0", "--app-spin -1us", "--app-spin -1µs: want 0 or more"},
		{"--size 8", "--size 7", "--size 7: want bytes of payload, 8 to 1472"},
		{"--size 8,1472", "--size 8,1473", "--size 1473: want bytes of payload, 8 to 1472"},
		{"--size 100", "--size 1e2", "--size 1e2: want bytes of payload, 8 to 1472"},
		{"--size 8,9", "--size 8,8", "--size 8,8: 8 appears twice"},
		{"--count 1", "--count 0", "--count 0: want 1 to 10000000"},
		{"--count 10000000", "--count 10000001", "--count 10000001: want 1 to 10000000"},
		{"--warmup 0", "--warmup -1", "--warmup -1: want 0 to 10000000"},
		{"--interval 0", "--interval -1ms", "--interval -1ms: want 0 or more"},
		{"--timeout 1ns", "--timeout 0", "--timeout 0s: want more than 0"},
		{"--client-wait spin", "--client-wait adaptive", "--client-wait adaptive: want block or spin"},
		{"--client-cpu -1", "--client-cpu -2", "--client-cpu -2: want a CPU number"},
		{"--client-cpu -1", "--client-cpu 1023", "--client-cpu 1023: not one of the"},
		{"--client-cpu -1", "--client-cpu 1024", "--client-cpu 1024: want a CPU number"},
		{"--nic-cpu=", "--nic-cpu -1", "--nic-cpu -1: want a CPU number"},
		{"--nic-cpu=", "--nic-cpu 1023", "--nic-cpu 1023: not one of the"},
		{"--hpus 1", "--hpus 0", "--hpus 0: want 1 to 64"},
		{"--hpus 64", "--hpus 65", "--hpus 65: want 1 to 64"},
		{"--wait sleep", "--wait block", "--wait block: want adaptive, sleep or spin"},
		{"--pin", "--pin --client-cpu 0", "--pin true: not with --client-cpu or --nic-cpu"},
		{"--pin", "--pin --nic-cpu 0", "--pin true: not with --client-cpu or --nic-cpu"},
		{"--serve", "--serve --json", "--json true: not with --serve"},
	})

	refusedFirst(t, newPingpongCmd(), "demo pingpong: --size 7", "--size", "7")
}

func TestHelperCommandsAreHidden(t *testing.T) {
	for _, cmd := range newHelperCmds() {
		if !cmd.Hidden {
			t.Errorf("%s is not hidden", cmd.Name())
		}
		cmd.SetArgs(nil)
		cmd.SilenceErrors = true
		if err := cmd.RunE(cmd, nil); err == nil || !strings.Contains(err.Error(), "own use") {
			t.Errorf("%s without options: error %v", cmd.Name(), err)
		}
	}
}
